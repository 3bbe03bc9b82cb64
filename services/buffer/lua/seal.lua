-- ARGV: batch, digest, manifest, then the groups
local batch, gids = tonumber(ARGV[1]), {}
if number_in(RUN, 'sealed') ~= batch then return 0 end
for at = 4, #ARGV do
  if redis.call('HGET', group_key(ARGV[at]), 'state') ~= 'KEPT' then return 0 end
end
even_if_full()
for at = 4, #ARGV do
  gids[#gids + 1] = ARGV[at]
  redis.call('HSET', group_key(ARGV[at]), 'batch', batch)
  move(ARGV[at], 'KEPT', 'READY')
end
redis.call('HSET', batch_key(batch), 'state', 'READY', 'digest', ARGV[2], 'manifest', ARGV[3],
  'groups', table.concat(gids, ' '), 'run_epoch', 0, 'commits', 0)
redis.call('HINCRBY', RUN, 'sealed', 1)
redis.call('HSET', RUN, 'recent_kept', math.floor(number_in(RUN, 'recent_kept') / 2),
  'recent_decided', math.floor(number_in(RUN, 'recent_decided') / 2))
for _, gid in ipairs(redis.call('ZRANGE', state_key('train', 'KEPT'), 0, -1)) do
  if is_too_old(gid) then finish(gid, 'KEPT', 'STALE', 'AGE') end
end
redis.call('DEL', P .. 'interval:' .. batch)
return 1
