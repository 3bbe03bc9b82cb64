-- ARGV: first, last. Returns {gid, ms until it lapses, stop reason, ...}, the first to lapse first.
local out, now = {}, now_ms()
local found = redis.call('ZRANGE', LEASES, ARGV[1], ARGV[2], 'WITHSCORES')
for at = 1, #found, 2 do
  out[#out + 1], out[#out + 2], out[#out + 3] = found[at], found[at + 1] - now, stop_reason(found[at])
end
return out
