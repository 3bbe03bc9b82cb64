-- Shared: batches move with all their groups.

local function groups_of(batch)
  return string.gmatch(redis.call('HGET', batch_key(batch), 'groups'), '%S+')
end

local function move_batch(batch, from, to)
  for gid in groups_of(batch) do move(gid, from, to) end
  redis.call('HSET', batch_key(batch), 'state', to)
end

-- Marks the batches below a step COMMITTED, whatever state they are in, and lets their tokens go after a while.
local function commit_batches(step, checkpoint)
  for batch = number_in(RUN, 'committed_step'), step - 1 do
    move_batch(batch, redis.call('HGET', batch_key(batch), 'state'), 'COMMITTED')
    redis.call('HINCRBY', batch_key(batch), 'commits', 1)
    for gid in groups_of(batch) do retain(gid) end
  end
  if step >= number_in(RUN, 'committed_step') then
    redis.call('HSET', RUN, 'committed_step', step, 'checkpoint', checkpoint)
  end
end
