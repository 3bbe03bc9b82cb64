-- ARGV: request_id, checkpoint step, checkpoint, then batch digests
if redis.call('HGET', RUN, 'epoch_request') == ARGV[1] then return number_in(RUN, 'run_epoch') end
local step, committed, sealed = tonumber(ARGV[2]), number_in(RUN, 'committed_step'), number_in(RUN, 'sealed')
if step < committed then
  return fail('FAILED_PRECONDITION', 'the checkpoint holds step ' .. step .. ', but step ' .. committed ..
    ' is committed: start from ' .. redis.call('HGET', RUN, 'checkpoint') .. ', or rewind the run')
end
for batch = 0, step - 1 do
  if batch >= sealed or redis.call('HGET', batch_key(batch), 'digest') ~= ARGV[4 + batch] then
    return fail('FAILED_PRECONDITION', 'the checkpoint was trained on a batch ' .. batch .. ' that this ledger does not have')
  end
end
even_if_full()
commit_batches(step, ARGV[3])
for batch = step, sealed - 1 do
  local state = redis.call('HGET', batch_key(batch), 'state')
  if state ~= 'READY' then move_batch(batch, state, 'READY') end
  redis.call('HSET', batch_key(batch), 'run_epoch', 0)
end
redis.call('HSET', RUN, 'acked', step, 'begun_step', step, 'epoch_request', ARGV[1])
return redis.call('HINCRBY', RUN, 'run_epoch', 1)
