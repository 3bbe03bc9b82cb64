-- ARGV: gid, reason ('' keeps the group), sum of rewards, number of rewards, seconds that a dropped payload is kept
local gid = ARGV[1]
if redis.call('HGET', group_key(gid), 'state') ~= 'SCORED' then return 0 end
redis.call('HINCRBYFLOAT', INTERVAL, 'reward_sum', ARGV[3])
redis.call('HINCRBY', INTERVAL, 'reward_count', ARGV[4])
if ARGV[2] == '' then
  redis.call('HINCRBY', INTERVAL, 'kept', 1)
  move(gid, 'SCORED', 'KEPT')
  return 1
end
redis.call('HINCRBY', INTERVAL, 'dropped:' .. ARGV[2], 1)
redis.call('HINCRBY', P .. 'train:dropped_reasons', ARGV[2], 1)
redis.call('HSET', group_key(gid), 'reason', ARGV[2])
move(gid, 'SCORED', 'DROPPED')
for index = 0, tonumber(ARGV[4]) - 1 do redis.call('EXPIRE', payload_key(gid, index), ARGV[5]) end
return 1
