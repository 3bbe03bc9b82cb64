-- ARGV: run_epoch, step, state, record, then name and size of each evaluation set that is due at this step
local stale = epoch_error(ARGV[1])
if stale then return stale end
local epoch, step, name = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[1] .. ':' .. ARGV[2]
local live_epoch, live_step = number_in(RUN, 'live_epoch'), number_in(RUN, 'live_step')
if ARGV[3] == 'LIVE' and epoch == live_epoch and step < live_step then
  return fail('FAILED_PRECONDITION', 'step ' .. live_step .. ' of this epoch is live already')
end
even_if_full()
redis.call('HSET', P .. 'versions', name, ARGV[4])
redis.call('HSET', P .. 'version_states', name, ARGV[3])
if ARGV[3] ~= 'LIVE' then return 0 end
if live_step >= 0 and (epoch ~= live_epoch or step ~= live_step) then
  redis.call('HSET', P .. 'version_states', live_epoch .. ':' .. live_step, 'RETIRED')
end
redis.call('HSET', RUN, 'live_epoch', epoch, 'live_step', step)
redis.call('HDEL', RUN, 'begun_step')
local now = now_ms()
for _, gid in ipairs(redis.call('ZRANGE', state_key('eval', 'WAITING'), 0, -1)) do
  if evaluated_step(gid) == step then redis.call('HSET', group_key(gid), 'issued_ms', now) end
end
for at = 5, #ARGV, 2 do
  local set = ARGV[at]
  if redis.call('SADD', P .. 'evaluations', step .. ':' .. set) == 1 then
    for index = 0, tonumber(ARGV[at + 1]) - 1 do
      local gid = string.format('e%06d-%s-%05d', step, set, index)
      local issue = redis.call('HINCRBY', RUN, 'eval_issued', 1)
      redis.call('HSET', group_key(gid), 'state', 'WAITING', 'issue', issue, 'step', step, 'set', set, 'index', index,
        'issued_ms', now)
      redis.call('ZADD', state_key('eval', 'WAITING'), issue, gid)
      redis.call('RPUSH', P .. 'evaluation:' .. step .. ':' .. set, gid)
    end
  end
end
return 1
