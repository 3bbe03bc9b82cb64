-- ARGV: max_attempts, evaluation deadline in ms. Takes back lapsed leases and ends evaluations that are late or whose
-- version is gone. Returns how many groups moved.
local now, moved = now_ms(), 0
for _, gid in ipairs(redis.call('ZRANGEBYSCORE', LEASES, 0, now, 'LIMIT', 0, 256)) do
  end_lease(gid, 'the lease expired', tonumber(ARGV[1]))
  moved = moved + 1
end
local live = number_in(RUN, 'live_step')
for _, state in ipairs({'WAITING', 'GENERATING'}) do
  for _, gid in ipairs(redis.call('ZRANGE', state_key('eval', state), 0, 255)) do
    local key, reason = group_key(gid), nil
    if number_in(key, 'step') ~= live then reason = 'VERSION_GONE' end
    if number_in(key, 'issued_ms') + tonumber(ARGV[2]) < now then reason = 'DEADLINE' end
    if reason then
      redis.call('ZREM', LEASES, gid)
      redis.call('HDEL', key, 'token')
      redis.call('HSET', key, 'reason', reason)
      redis.call('HINCRBY', P .. 'eval:failed_reasons', reason, 1)
      move(gid, state, 'FAILED')
      moved = moved + 1
    end
  end
end
return moved
