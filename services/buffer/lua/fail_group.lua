-- ARGV: gid, state that it is in, reason, message. A group that cannot be graded or filtered.
if redis.call('HGET', group_key(ARGV[1]), 'state') ~= ARGV[2] then return 0 end
finish(ARGV[1], ARGV[2], 'FAILED', ARGV[4], ARGV[3])
return 1
