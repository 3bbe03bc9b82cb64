-- ARGV: gid, token, error, max_attempts
if redis.call('HGET', group_key(ARGV[1]), 'token') ~= ARGV[2] then return 0 end
end_lease(ARGV[1], ARGV[3], tonumber(ARGV[4]))
return 1
