-- ARGV: run_epoch. Returns {batch, 1 if a trained batch is not committed, manifest}; batch is -1 if none is sealed, -2 if the
-- run is complete.
local stale = epoch_error(ARGV[1])
if stale then return stale end
local batch = number_in(RUN, 'acked')
local uncommitted = batch > number_in(RUN, 'committed_step') and 1 or 0
if batch >= number_in(RUN, 'num_rollout') then return {-2, uncommitted} end
if batch >= number_in(RUN, 'sealed') then return {-1, uncommitted} end
local key = batch_key(batch)
if redis.call('HGET', key, 'state') == 'READY' then
  even_if_full()
  move_batch(batch, 'READY', 'IN_TRAINING')
  redis.call('HSET', key, 'run_epoch', ARGV[1])
end
return {batch, uncommitted, redis.call('HGET', key, 'manifest')}
