-- ARGV: first, last. Returns {gid, ms until it lapses, stop reason, ...}, the first to lapse first.
local out, now, reason_of = {}, now_ms(), stop_reasons()
local found = redis.call('ZRANGE', LEASES, ARGV[1], ARGV[2], 'WITHSCORES')
for at = 1, #found, 2 do
  local worker = redis.call('HGET', group_key(found[at]), 'worker')
  out[#out + 1], out[#out + 2], out[#out + 3] = found[at], found[at + 1] - now, reason_of(found[at], worker)
end
return out
