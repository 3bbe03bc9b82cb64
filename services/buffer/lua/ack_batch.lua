-- ARGV: run_epoch, batch, digest
local stale = epoch_error(ARGV[1])
if stale then return stale end
local key = batch_key(ARGV[2])
local state, digest = redis.call('HGET', key, 'state'), redis.call('HGET', key, 'digest')
if not state then return fail('NOT_FOUND', 'batch ' .. ARGV[2] .. ' is not sealed') end
if digest ~= ARGV[3] then
  return fail('FAILED_PRECONDITION', 'batch ' .. ARGV[2] .. ' has digest ' .. digest .. ', not ' .. ARGV[3])
end
if state == 'IN_TRAINING' then
  even_if_full()
  move_batch(ARGV[2], 'IN_TRAINING', 'TRAINED')
  redis.call('HSET', RUN, 'acked', ARGV[2] + 1)
  return 1
end
if state == 'READY' then return fail('FAILED_PRECONDITION', 'batch ' .. ARGV[2] .. ' is not leased') end
return 0
