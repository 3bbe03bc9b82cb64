-- ARGV: gid, rewards (JSON), verdicts (JSON)
if redis.call('HGET', group_key(ARGV[1]), 'state') ~= 'GENERATED' then return 0 end
even_if_full()
redis.call('HSET', group_key(ARGV[1]), 'rewards', ARGV[2], 'verdicts', ARGV[3])
move(ARGV[1], 'GENERATED', 'SCORED')
if ledger_of(ARGV[1]) == 'eval' then retain(ARGV[1]) end
return 1
