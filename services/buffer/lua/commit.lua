-- ARGV: run_epoch, step, checkpoint
local stale = epoch_error(ARGV[1])
if stale then return stale end
local step = tonumber(ARGV[2])
if step > number_in(RUN, 'acked') then
  return fail('FAILED_PRECONDITION', 'step ' .. step .. ' has batches that were not acknowledged')
end
even_if_full()
commit_batches(step, ARGV[3])
return 1
