-- ARGV: spec_digest, num_rollout
local known = redis.call('HGET', RUN, 'spec_digest')
if known and known ~= ARGV[1] then
  return fail('FAILED_PRECONDITION', 'the run exists with another spec: its digest is ' .. known .. ', yours is ' .. ARGV[1])
end
if not known then
  redis.call('HSET', RUN, 'spec_digest', ARGV[1], 'num_rollout', ARGV[2], 'desired_state', 'RUNNING', 'live_step', -1)
end
return redis.call('HGETALL', RUN)
