-- ARGV: gid, token, ttl_ms. Returns the desired state of the run, and 1 if an evaluation group's version is gone.
local key = group_key(ARGV[1])
if redis.call('HGET', key, 'token') ~= ARGV[2] then return fail('ABORTED', 'the lease of ' .. ARGV[1] .. ' is lost') end
redis.call('ZADD', LEASES, now_ms() + tonumber(ARGV[3]), ARGV[1])
local gone = ledger_of(ARGV[1]) == 'eval' and number_in(key, 'step') ~= number_in(RUN, 'live_step')
return {redis.call('HGET', RUN, 'desired_state'), gone and 1 or 0}
