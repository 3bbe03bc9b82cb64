-- ARGV: request_id, step. Takes committed batches from a step on back, and issues their prompts anew. Returns {lineage, groups}.
if redis.call('HGET', RUN, 'rewind_request') == ARGV[1] then
  return {number_in(RUN, 'lineage'), number_in(RUN, 'reissued')}
end
local step, committed = tonumber(ARGV[2]), number_in(RUN, 'committed_step')
if step >= committed then
  return fail('FAILED_PRECONDITION', 'step ' .. step .. ' is not below the committed step ' .. committed)
end
even_if_full()
local lineage, reissued = redis.call('HINCRBY', RUN, 'lineage', 1), 0
for batch = committed, number_in(RUN, 'sealed') - 1 do
  for gid in groups_of(batch) do
    redis.call('HDEL', group_key(gid), 'batch')
    move(gid, redis.call('HGET', batch_key(batch), 'state'), 'KEPT')
  end
  redis.call('DEL', batch_key(batch))
end
for batch = step, committed - 1 do
  for gid in groups_of(batch) do
    local prompt = redis.call('HGET', group_key(gid), 'prompt') or number_in(group_key(gid), 'issue')
    local issue = redis.call('HINCRBY', RUN, 'issued', 1) - 1
    local anew = string.format('g%08d', issue)
    redis.call('HSET', group_key(anew), 'state', 'WAITING', 'issue', issue, 'prompt', prompt)
    redis.call('ZADD', state_key('train', 'WAITING'), issue, anew)
    redis.call('HINCRBY', RUN, 'kept_total', -1)
    reissued = reissued + 1
  end
  redis.call('RENAME', batch_key(batch), batch_key(batch .. '@' .. lineage))
end
-- Nothing starts until the weights of the step serve again.
local live = redis.call('HMGET', RUN, 'live_epoch', 'live_step')
if live[2] ~= '-1' then redis.call('HSET', P .. 'version_states', live[1] .. ':' .. live[2], 'RETIRED') end
redis.call('HSET', RUN, 'live_step', -1, 'begun_step', step, 'sealed', step, 'acked', step, 'committed_step', step,
  'checkpoint', '', 'rewind_request', ARGV[1], 'reissued', reissued)
redis.call('HINCRBY', RUN, 'run_epoch', 1)
return {lineage, reissued}
