-- Shared by every script. KEYS[1] is the prefix of the run's keys, 'flotilla:{run_id}:'; its hash tag keeps all of them in
-- one slot of a Redis Cluster.
--
-- run              hash    issued, sealed, acked, run_epoch, live_epoch, live_step, committed_step, desired_state, ...
-- train:<STATE>    zset    groups in that state, by issue number (KEPT: in the order they were kept)
-- eval:<STATE>     zset    evaluation groups in that state
-- group:<id>       hash    state, issue, attempts, failures, token, reason, batch, h:<i> (header of finished sample i), ...
-- payload:<id>:<i> string  serialized Sample
-- leases           zset    leased groups, by deadline in ms of Redis time
-- batch:<b>        hash    state, digest, manifest, run_epoch, groups
-- interval         hash    what happened since the last seal
-- versions         hash    '<epoch>:<step>' -> serialized Version
local P = KEYS[1]
local RUN = P .. 'run'
local LEASES = P .. 'leases'
local INTERVAL = P .. 'interval'

local function group_key(gid) return P .. 'group:' .. gid end
local function payload_key(gid, index) return P .. 'payload:' .. gid .. ':' .. index end
local function batch_key(batch) return P .. 'batch:' .. batch end
local function ledger_of(gid) return string.sub(gid, 1, 1) == 'e' and 'eval' or 'train' end
local function state_key(ledger, state) return P .. ledger .. ':' .. state end
local function number_in(key, field) return tonumber(redis.call('HGET', key, field) or '0') end
local function size(ledger, state) return redis.call('ZCARD', state_key(ledger, state)) end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Moves a group between states. Every group of a ledger is in exactly one of its sets: the conservation law.
local function move(gid, from, to)
  local ledger, key = ledger_of(gid), group_key(gid)
  if redis.call('ZREM', state_key(ledger, from), gid) ~= 1 then error(gid .. ' is not ' .. from) end
  local order = to == 'KEPT' and redis.call('HINCRBY', RUN, 'kept_total', 1) or number_in(key, 'issue')
  redis.call('ZADD', state_key(ledger, to), order, gid)
  redis.call('HSET', key, 'state', to)
end

-- Ends a lease without completing the group.
local function end_lease(gid, failure, max_attempts)
  local key = group_key(gid)
  redis.call('ZREM', LEASES, gid)
  redis.call('HDEL', key, 'token')
  if failure ~= '' then
    redis.call('HSET', key, 'reason', failure)
    if redis.call('HINCRBY', key, 'failures', 1) >= max_attempts then
      redis.call('HINCRBY', P .. ledger_of(gid) .. ':failed_reasons', 'MAX_ATTEMPTS', 1)
      return move(gid, 'GENERATING', 'FAILED')
    end
  end
  return move(gid, 'GENERATING', 'WAITING')
end

local function fail(code, message) return redis.error_reply(code .. ' ' .. message) end

local function epoch_error(epoch)
  local current = number_in(RUN, 'run_epoch')
  if tonumber(epoch) ~= current then
    return fail('ABORTED', 'run_epoch ' .. epoch .. ' is not the current epoch ' .. current .. ': another trainer runs')
  end
end

local function move_batch(batch, from, to)
  local key = batch_key(batch)
  for gid in string.gmatch(redis.call('HGET', key, 'groups'), '%S+') do move(gid, from, to) end
  redis.call('HSET', key, 'state', to)
end
