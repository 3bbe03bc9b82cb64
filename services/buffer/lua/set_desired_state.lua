-- ARGV: desired state
local current = redis.call('HGET', RUN, 'desired_state')
if current == 'STOPPED' and ARGV[1] ~= 'STOPPED' then return fail('FAILED_PRECONDITION', 'the run is STOPPED, which is final') end
even_if_full()
redis.call('HSET', RUN, 'desired_state', ARGV[1])
-- The deadline of an evaluation does not run while nothing may be handed out.
if current == 'PAUSED' and ARGV[1] == 'RUNNING' then
  for _, gid in ipairs(redis.call('ZRANGE', state_key('eval', 'WAITING'), 0, -1)) do
    redis.call('HSET', group_key(gid), 'issued_ms', now_ms())
  end
end
return 1
