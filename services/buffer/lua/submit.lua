-- ARGV: gid, token, samples in a group, response tokens, then index, header, content hash, oldest step, payload of each sample.
-- Returns 1 if the group is complete.
local gid, key = ARGV[1], group_key(ARGV[1])
local held = redis.call('HGET', key, 'token') == ARGV[2]
if not held and redis.call('HGET', key, 'done_token') ~= ARGV[2] then
  return fail('ABORTED', 'the lease of ' .. gid .. ' is lost')
end
local fresh = {}
for at = 5, #ARGV, 5 do
  local known = redis.call('HGET', key, 'hash:' .. ARGV[at])
  if known and known ~= ARGV[at + 2] then
    return fail('ALREADY_EXISTS', 'sample ' .. ARGV[at] .. ' of ' .. gid .. ' was submitted with other content')
  end
  if not known then fresh[#fresh + 1] = at end
end
if not held then return #fresh == 0 and 1 or fail('ABORTED', 'the lease of ' .. gid .. ' is lost') end
for _, at in ipairs(fresh) do
  redis.call('SET', payload_key(gid, ARGV[at]), ARGV[at + 4])
  redis.call('HSET', key, 'h:' .. ARGV[at], ARGV[at + 1], 'hash:' .. ARGV[at], ARGV[at + 2])
  if redis.call('HEXISTS', key, 'p:' .. ARGV[at]) == 1 then forget_fragments(gid, ARGV[at]) end
  note_age(gid, tonumber(ARGV[at + 3]))
end
local finished = redis.call('HINCRBY', key, 'finished', #fresh)
if #fresh > 0 and ledger_of(gid) == 'train' then redis.call('HINCRBY', INTERVAL, 'tokens', ARGV[4]) end
if finished < tonumber(ARGV[3]) then return 0 end
redis.call('ZREM', LEASES, gid)
redis.call('HDEL', key, 'token')
redis.call('HSET', key, 'done_token', ARGV[2])
recount_age(gid)
move(gid, 'GENERATING', 'GENERATED')
return 1
