-- ARGV: worker_id. Returns {leases of the worker, gid, token, reason of each that must stop, ...}.
local out, held, reason_of = {}, 0, stop_reasons()
for _, gid in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do
  local fields = redis.call('HMGET', group_key(gid), 'worker', 'token')
  if fields[1] == ARGV[1] then
    held = held + 1
    local reason = reason_of(gid, fields[1])
    if reason ~= '' then out[#out + 1], out[#out + 2], out[#out + 3] = gid, fields[2], reason end
  end
end
table.insert(out, 1, held)
return out
