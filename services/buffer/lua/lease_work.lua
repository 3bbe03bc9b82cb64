-- ARGV: request_id, worker_id, max_groups, ttl_ms, token_prefix, 1 if no fresh group may be issued for want of memory,
-- 1 if only the interrupted groups that follow may go on, those groups. Returns {gid, token, gid, token, ...}, or nothing to
-- a worker that is drained.
local repeated = P .. 'request:' .. ARGV[1]
local earlier = redis.call('LRANGE', repeated, 0, -1)
if #earlier > 0 then return earlier end
if redis.call('SISMEMBER', DRAINED, ARGV[2]) == 1 then return false end
if redis.call('HGET', RUN, 'desired_state') ~= 'RUNNING' then return {} end
local room, ttl_ms, now = tonumber(ARGV[3]), tonumber(ARGV[4]), now_ms()
local live, staleness, out = number_in(RUN, 'live_step'), policy('max_staleness'), {}
local any_weights = staleness > 0 or policy('partial_rollout') == 1

local function lease(gid, from)
  even_if_full()
  local key = group_key(gid)
  local token = ARGV[5] .. ':' .. gid
  local newest = tonumber(redis.call('HGET', key, 'newest'))
  if newest and not any_weights and (newest ~= live or number_in(key, 'partial_oldest') ~= live) then
    discard_partial(gid, 'RESTARTED')
  end
  move(gid, from, 'GENERATING')
  note_age(gid, live) -- of what it generates now
  redis.call('HSET', key, 'token', token, 'worker', ARGV[2])
  redis.call('HINCRBY', key, 'attempts', 1)
  redis.call('ZADD', LEASES, now + ttl_ms, gid)
  out[#out + 1], out[#out + 2] = gid, token
  room = room - 1
end

local function lease_from(state, most)
  local count = math.min(room, most or room)
  if count <= 0 then return end
  for _, gid in ipairs(redis.call('ZRANGE', state_key('train', state), 0, count - 1)) do lease(gid, state) end
end

local function issue(count)
  for _ = 1, count do
    local number = redis.call('HINCRBY', RUN, 'issued', 1) - 1
    local prompt = redis.call('HINCRBY', RUN, 'cursor', 1) - 1
    local gid = string.format('g%08d', number)
    redis.call('HSET', group_key(gid), 'state', 'WAITING', 'issue', number)
    if prompt ~= number then redis.call('HSET', group_key(gid), 'prompt', prompt) end
    redis.call('ZADD', state_key('train', 'WAITING'), number, gid)
  end
end

-- How many fresh groups the admission allows.
local function credit()
  local size, over, playing = policy('batch_size'), policy('over_sampling'), in_play()
  local missing = target() - number_in(RUN, 'kept_total')
  if policy('refill_batch') == 1 then return playing < missing and over or 0 end
  -- A filter that keeps what it must gets no more than it asks for, or too few would never be left.
  if policy('fallback') == 1 and playing >= missing then return 0 end
  -- The keep rate, as if a batch had been kept of as many as are over-sampled before any was graded.
  local kept, decided = number_in(RUN, 'recent_kept') + size, number_in(RUN, 'recent_decided') + over
  return math.min(missing + over - size, math.ceil(missing * decided / kept)) - playing
end

local evaluating = size('eval', 'GENERATING') > 0
for _, gid in ipairs(redis.call('ZRANGE', state_key('eval', 'WAITING'), 0, -1)) do
  if evaluated_step(gid) == live then
    evaluating = true
    if room <= 0 then break end
    lease(gid, 'WAITING')
    redis.call('HSET', group_key(gid), 'epoch', number_in(RUN, 'live_epoch'))
  end
end
-- With staleness 0 nothing is handed out between a seal and the next live version, or while a version is evaluated.
local open = live >= 0 and not is_closed() and number_in(RUN, 'sealed') <= step_of_run() + staleness
if open and not (evaluating and staleness == 0) then
  if ARGV[7] == '1' then
    for at = 8, math.min(#ARGV, 7 + room) do
      if redis.call('HGET', group_key(ARGV[at]), 'state') == 'PARTIAL' then lease(ARGV[at], 'PARTIAL') end
    end
  else
    lease_from('PARTIAL')
  end
  -- After a rewind, or where the trainer went back, more may wait than the bound allows.
  local bound = target() + policy('over_sampling') * (policy('refill_batch') + 1) - policy('batch_size')
  local waiting = size('train', 'WAITING')
  lease_from('WAITING', bound - number_in(RUN, 'kept_total') - in_play() + waiting)
  local full = ARGV[6] == '1' and number_in(RUN, 'sealed') > number_in(RUN, 'committed_step')
  while room > 0 and not full do
    local count = credit()
    if count <= 0 then break end
    issue(policy('refill_batch') == 1 and count or math.min(count, room))
    lease_from('WAITING')
  end
  -- A filter that lets nothing go on does not stop the run.
  if #out == 0 and in_play() == size('train', 'PARTIAL') then lease_from('PARTIAL') end
  if #out > 0 then redis.call('HSETNX', INTERVAL, 'started_ms', now) end
end
if #out > 0 then
  redis.call('RPUSH', repeated, unpack(out))
  redis.call('PEXPIRE', repeated, ttl_ms)
end
return out
