-- ARGV: gid, 1 to keep it, reason for dropping it, 1 to keep it nevertheless where too few would be left, sum of rewards,
-- number of rewards. Returns the state that it is in then.
local gid, keep = ARGV[1], ARGV[2] == '1'
if redis.call('HGET', group_key(gid), 'state') ~= 'SCORED' then return '' end
even_if_full()
redis.call('HINCRBYFLOAT', INTERVAL, 'reward_sum', ARGV[5])
redis.call('HINCRBY', INTERVAL, 'reward_count', ARGV[6])
keep = keep or (ARGV[4] == '1' and number_in(RUN, 'kept_total') + in_play() <= target())
redis.call('HINCRBY', RUN, 'recent_decided', 1)
redis.call('HINCRBY', RUN, 'recent_kept', keep and 1 or 0)
if not keep then
  redis.call('HINCRBY', INTERVAL, 'dropped:' .. ARGV[3], 1)
  finish(gid, 'SCORED', 'DROPPED', ARGV[3])
  return 'DROPPED'
end
if is_too_old(gid) then
  finish(gid, 'SCORED', 'STALE', 'AGE')
  return 'STALE'
end
redis.call('HINCRBY', INTERVAL, 'kept', 1)
move(gid, 'SCORED', 'KEPT')
return 'KEPT'
