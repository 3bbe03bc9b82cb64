-- ARGV: gid, rewards (JSON), verdicts (JSON), seconds that the payload of an evaluation is kept
if redis.call('HGET', group_key(ARGV[1]), 'state') ~= 'GENERATED' then return 0 end
redis.call('HSET', group_key(ARGV[1]), 'rewards', ARGV[2], 'verdicts', ARGV[3])
move(ARGV[1], 'GENERATED', 'SCORED')
if ledger_of(ARGV[1]) == 'eval' then
  for index = 0, number_in(group_key(ARGV[1]), 'finished') - 1 do
    redis.call('EXPIRE', payload_key(ARGV[1], index), ARGV[4])
  end
end
return 1
