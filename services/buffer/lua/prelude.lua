-- Shared by every script. KEYS[1] is the prefix of the run's keys, 'flotilla:{run_id}:'; its hash tag keeps all of them in
-- one slot of a Redis Cluster.
--
-- run              hash    issued, cursor, sealed, acked, run_epoch, live_epoch, live_step, committed_step, desired_state, ...
-- policy           hash    what the run spec says about sampling, written at the start of the buffer
-- train:<STATE>    zset    groups in that state, by issue number (KEPT: in the order they were kept)
-- eval:<STATE>     zset    evaluation groups in that state
-- group:<id>       hash    state, issue, prompt, attempts, failures, token, worker, reason, batch, oldest, rewards, ...
--                          of finished sample i: h:<i> header, hash:<i> SHA-256; of unfinished: p:<i> saved tokens,
--                          f:<i> first token of each saved fragment
-- payload:<id>:<i> string  serialized Sample
-- partial:<id>:<i> list    serialized SampleFragments of an unfinished sample
-- leases           zset    leased groups, by deadline in ms of Redis time
-- aging            zset    groups in play by their oldest policy step: of their tokens, and of the weights when they were leased
-- retained         zset    groups at the end of their life, by the time in ms at which their tokens go
-- batch:<b>        hash    state, digest, manifest, run_epoch, groups, commits; batch:<b>@<lineage> is one that was taken back
-- interval         hash    what happened since the last seal; interval:<b>: set aside for a batch that is being sealed
-- versions         hash    '<epoch>:<step>' -> serialized Version; version_states: its state
-- evaluations      set     '<step>:<set>' that were issued; evaluation:<step>:<set>: list of its groups
-- *_reasons        hash    of a ledger, a state's groups by reason; discarded: response tokens thrown away, by reason
-- request:<id>     list    what a LeaseWork answered, for a while
-- drained          set     gateways that get no more work
local P = KEYS[1]
local RUN, POLICY, INTERVAL = P .. 'run', P .. 'policy', P .. 'interval'
local LEASES, AGING, RETAINED, DRAINED = P .. 'leases', P .. 'aging', P .. 'retained', P .. 'drained'
local IN_PLAY = {WAITING = true, GENERATING = true, PARTIAL = true, GENERATED = true, SCORED = true}

local function group_key(gid) return P .. 'group:' .. gid end
local function payload_key(gid, index) return P .. 'payload:' .. gid .. ':' .. index end
local function partial_key(gid, index) return P .. 'partial:' .. gid .. ':' .. index end
local function batch_key(batch) return P .. 'batch:' .. batch end
local function ledger_of(gid) return string.sub(gid, 1, 1) == 'e' and 'eval' or 'train' end
local function state_key(ledger, state) return P .. ledger .. ':' .. state end
local function number_in(key, field) return tonumber(redis.call('HGET', key, field) or '0') end
local function policy(name) return tonumber(redis.call('HGET', POLICY, name)) end
local function size(ledger, state) return redis.call('ZCARD', state_key(ledger, state)) end
local function fail(code, message) return redis.error_reply(code .. ' ' .. message) end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A full Redis refuses a script at its first write, unless that write frees memory, and lets the others through. What ends in
-- freeing memory must go on then: a DEL of nothing opens the way. Not where nothing else is written: it costs an fsync.
local function even_if_full() redis.call('DEL', P .. 'nothing') end

-- Moves a group between states. Every group of a ledger is in exactly one of its sets: the conservation law.
local function move(gid, from, to)
  local ledger, key = ledger_of(gid), group_key(gid)
  if redis.call('ZREM', state_key(ledger, from), gid) ~= 1 then error(gid .. ' is not ' .. from) end
  local order
  if to == 'KEPT' then order = redis.call('HINCRBY', RUN, 'kept_order', 1) else order = number_in(key, 'issue') end
  redis.call('ZADD', state_key(ledger, to), order, gid)
  redis.call('HSET', key, 'state', to)
  if from == 'SCORED' and to == 'KEPT' then redis.call('HINCRBY', RUN, 'kept_total', 1) end
  if from == 'KEPT' and to == 'STALE' then redis.call('HINCRBY', RUN, 'kept_total', -1) end
  if IN_PLAY[from] and not IN_PLAY[to] then redis.call('ZREM', AGING, gid) end
end

-- Lets the tokens of a group go after a while.
local function retain(gid) redis.call('ZADD', RETAINED, now_ms() + policy('keep_payload_ms'), gid) end

-- The step that decides what may start: that of the live weights, or of the checkpoint of a trainer that went back to one
-- and has not published yet.
local function step_of_run()
  local live = tonumber(redis.call('HGET', RUN, 'live_step'))
  return math.min(live, redis.call('HGET', RUN, 'begun_step') or live)
end

local function in_play()
  return size('train', 'WAITING') + size('train', 'GENERATING') + size('train', 'PARTIAL') + size('train', 'GENERATED')
    + size('train', 'SCORED')
end

-- Groups that may be kept before the trainer has moved on.
local function target()
  return math.min(step_of_run() + policy('max_staleness') + 1, number_in(RUN, 'num_rollout')) * policy('batch_size')
end

-- True if the next batch cannot take a group.
local function is_too_old(gid)
  local oldest = redis.call('HGET', group_key(gid), 'oldest')
  return oldest and tonumber(oldest) + policy('max_sample_age') < number_in(RUN, 'sealed')
end

local function epoch_error(epoch)
  local current = number_in(RUN, 'run_epoch')
  if tonumber(epoch) ~= current then
    return fail('ABORTED', 'run_epoch ' .. epoch .. ' is not the current epoch ' .. current .. ': another trainer runs')
  end
end
