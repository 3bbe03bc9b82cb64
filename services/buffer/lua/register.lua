-- ARGV: spec_digest, num_rollout, data_digest ('' if the caller has not read the data), then names and values of the policy
local known = redis.call('HGET', RUN, 'spec_digest')
if known and known ~= ARGV[1] then
  return fail('FAILED_PRECONDITION', 'the run exists with another spec: its digest is ' .. known .. ', yours is ' .. ARGV[1])
end
local data = redis.call('HGET', RUN, 'data_digest')
if ARGV[3] ~= '' and data and data ~= ARGV[3] then
  return fail('FAILED_PRECONDITION', 'a data file or the tokenizer has changed since the run began; give a new run_id')
end
even_if_full()
if ARGV[3] ~= '' then redis.call('HSET', RUN, 'data_digest', ARGV[3]) end
redis.call('HSET', POLICY, unpack(ARGV, 4))
if not known then
  redis.call('HSET', RUN, 'spec_digest', ARGV[1], 'num_rollout', ARGV[2], 'desired_state', 'RUNNING', 'live_step', -1)
end
return redis.call('HGETALL', RUN)
