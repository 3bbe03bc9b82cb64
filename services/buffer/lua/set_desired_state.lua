-- ARGV: desired state
local current = redis.call('HGET', RUN, 'desired_state')
if current == 'STOPPED' and ARGV[1] ~= 'STOPPED' then return fail('FAILED_PRECONDITION', 'the run is STOPPED, which is final') end
even_if_full()
redis.call('HSET', RUN, 'desired_state', ARGV[1])
return 1
