-- Marks the batches below a step COMMITTED, whatever state they are in, and lets their payloads expire.
local function commit_batches(step, checkpoint, keep_s)
  for batch = number_in(RUN, 'committed_step'), step - 1 do
    local key = batch_key(batch)
    move_batch(batch, redis.call('HGET', key, 'state'), 'COMMITTED')
    redis.call('HINCRBY', key, 'commits', 1)
    for gid in string.gmatch(redis.call('HGET', key, 'groups'), '%S+') do
      for index = 0, number_in(group_key(gid), 'finished') - 1 do redis.call('EXPIRE', payload_key(gid, index), keep_s) end
    end
  end
  if step >= number_in(RUN, 'committed_step') then
    redis.call('HSET', RUN, 'committed_step', step, 'checkpoint', checkpoint)
  end
end
