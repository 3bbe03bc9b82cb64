-- ARGV: run_epoch. Returns {batch, manifest}, or {-1} if none is sealed, or {-2} if the run is complete.
local stale = epoch_error(ARGV[1])
if stale then return stale end
local batch = number_in(RUN, 'acked')
if batch >= number_in(RUN, 'num_rollout') then return {-2} end
if batch >= number_in(RUN, 'sealed') then return {-1} end
local key = batch_key(batch)
if redis.call('HGET', key, 'state') == 'READY' then
  move_batch(batch, 'READY', 'IN_TRAINING')
  redis.call('HSET', key, 'run_epoch', ARGV[1])
end
return {batch, redis.call('HGET', key, 'manifest')}
