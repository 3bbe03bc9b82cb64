-- ARGV: evaluation deadline in ms, 1 if memory is short. Takes back lapsed leases, ends late evaluations and what is too old,
-- and lets go of tokens that nobody needs. Returns {groups that moved, groups that let go}.
local LIMIT = 256
local now, moved = now_ms(), 0
for _, gid in ipairs(redis.call('ZRANGEBYSCORE', LEASES, 0, now, 'LIMIT', 0, LIMIT)) do
  end_lease(gid, 'the lease expired')
  moved = moved + 1
end
local live, running = number_in(RUN, 'live_step'), redis.call('HGET', RUN, 'desired_state') == 'RUNNING'
for _, state in ipairs({'WAITING', 'GENERATING'}) do
  for _, gid in ipairs(redis.call('ZRANGE', state_key('eval', state), 0, LIMIT - 1)) do
    local step, reason = evaluated_step(gid), nil
    -- Weights that went back come again: the evaluation waits for them.
    if step < live then reason = 'VERSION_GONE' end
    if step == live and running and number_in(group_key(gid), 'issued_ms') + tonumber(ARGV[1]) < now then reason = 'DEADLINE' end
    if reason then
      redis.call('ZREM', LEASES, gid)
      redis.call('HDEL', group_key(gid), 'token')
      finish(gid, state, 'FAILED', reason)
      moved = moved + 1
    end
  end
end
local oldest = number_in(RUN, 'sealed') - policy('max_sample_age') - 1
for _, gid in ipairs(redis.call('ZRANGEBYSCORE', AGING, '-inf', oldest)) do
  local state = redis.call('HGET', group_key(gid), 'state')
  if state == 'PARTIAL' or state == 'WAITING' then
    finish(gid, state, 'STALE', 'AGE')
    moved = moved + 1
  end
end

-- Of a training group a tombstone stays; of an evaluation group all but the responses, since results are read from it.
local gone = redis.call('ZRANGEBYSCORE', RETAINED, 0, ARGV[2] == '1' and '+inf' or now, 'LIMIT', 0, LIMIT)
for _, gid in ipairs(gone) do
  local key = group_key(gid)
  for index = 0, group_size(gid) - 1 do
    redis.call('DEL', payload_key(gid, index))
    forget_fragments(gid, index)
    if ledger_of(gid) == 'train' then redis.call('HDEL', key, 'h:' .. index, 'hash:' .. index) end
  end
  if ledger_of(gid) == 'train' then redis.call('HDEL', key, 'done_token', 'verdicts', 'partial_oldest', 'newest') end
  redis.call('ZREM', RETAINED, gid)
end
return {moved, #gone}
