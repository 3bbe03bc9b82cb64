-- ARGV: gid, reason, message. A group that cannot be graded.
local gid = ARGV[1]
if redis.call('HGET', group_key(gid), 'state') ~= 'GENERATED' then return 0 end
redis.call('HSET', group_key(gid), 'reason', ARGV[3])
redis.call('HINCRBY', P .. ledger_of(gid) .. ':failed_reasons', ARGV[2], 1)
move(gid, 'GENERATED', 'FAILED')
return 1
