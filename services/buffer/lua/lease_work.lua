-- ARGV: request_id, worker_id, max_groups, ttl_ms, token_prefix, batch_size, over_sampling, max_staleness
-- Returns {gid, token, gid, token, ...}.
local repeated = P .. 'request:' .. ARGV[1]
local ttl_ms, room = tonumber(ARGV[4]), tonumber(ARGV[3])
local batch_size, over, staleness = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local earlier = redis.call('LRANGE', repeated, 0, -1)
if #earlier > 0 then return earlier end
if redis.call('HGET', RUN, 'desired_state') ~= 'RUNNING' then return {} end
local live, deadline, out = number_in(RUN, 'live_step'), now_ms() + ttl_ms, {}

local function lease(gid, from)
  local key = group_key(gid)
  local token = ARGV[5] .. ':' .. gid
  move(gid, from, 'GENERATING')
  redis.call('HSET', key, 'token', token, 'worker', ARGV[2])
  redis.call('HINCRBY', key, 'attempts', 1)
  redis.call('ZADD', LEASES, deadline, gid)
  out[#out + 1], out[#out + 2] = gid, token
  room = room - 1
end

local function lease_from(ledger, state)
  if room <= 0 then return end
  for _, gid in ipairs(redis.call('ZRANGE', state_key(ledger, state), 0, room - 1)) do lease(gid, state) end
end

lease_from('eval', 'WAITING')
local evaluating = size('eval', 'WAITING') + size('eval', 'GENERATING') > 0
local sealed, last = number_in(RUN, 'sealed'), number_in(RUN, 'num_rollout')
-- With staleness 0 nothing is handed out between a seal and the next live version, or while a version is evaluated.
local open = live >= 0 and sealed < last and sealed <= live + staleness and not (evaluating and staleness == 0)
if open then
  lease_from('train', 'PARTIAL')
  lease_from('train', 'WAITING')
  local in_play = size('train', 'WAITING') + size('train', 'GENERATING') + size('train', 'PARTIAL')
    + size('train', 'GENERATED') + size('train', 'SCORED')
  local bound = math.min(live + staleness + 1, last) * batch_size + (over - batch_size)
  local credit = bound - (number_in(RUN, 'kept_total') - size('train', 'STALE')) - in_play
  while room > 0 and credit > 0 do
    local issue = redis.call('HINCRBY', RUN, 'issued', 1) - 1
    local gid = string.format('g%08d', issue)
    redis.call('HSET', group_key(gid), 'state', 'WAITING', 'issue', issue)
    redis.call('ZADD', state_key('train', 'WAITING'), issue, gid)
    lease(gid, 'WAITING')
    credit = credit - 1
  end
  if #out > 0 then redis.call('HSETNX', INTERVAL, 'started_ms', deadline - ttl_ms) end
end
if #out > 0 then
  redis.call('RPUSH', repeated, unpack(out))
  redis.call('PEXPIRE', repeated, ttl_ms)
end
return out
