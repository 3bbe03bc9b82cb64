-- Shared: what becomes of leases, of the tokens of unfinished samples, and of groups that are not trained on.

local function group_size(gid) return policy(ledger_of(gid) == 'eval' and 'evaluation_samples' or 'samples') end

local function note_age(gid, step)
  if ledger_of(gid) == 'eval' then return end
  local oldest = redis.call('HGET', group_key(gid), 'oldest')
  if oldest and tonumber(oldest) <= step then return end
  redis.call('HSET', group_key(gid), 'oldest', step)
  redis.call('ZADD', AGING, step, gid)
end

-- Begins of the saved fragments that stay before a new one, how many must go, and whether the new one begins where one
-- begins or ends.
local function before_fragment(gid, index, begin)
  local begins, gone, is_boundary = {}, 0, begin == number_in(group_key(gid), 'p:' .. index)
  for one in string.gmatch(redis.call('HGET', group_key(gid), 'f:' .. index) or '', '%d+') do
    is_boundary = is_boundary or tonumber(one) == begin
    if tonumber(one) < begin then begins[#begins + 1] = one else gone = gone + 1 end
  end
  return begins, gone, is_boundary
end

local function save_fragment(gid, index, begin, tokens, oldest, newest, payload)
  local key, begins, gone = group_key(gid), before_fragment(gid, index, begin)
  for _ = 1, gone do redis.call('RPOP', partial_key(gid, index)) end
  begins[#begins + 1] = begin
  redis.call('RPUSH', partial_key(gid, index), payload)
  redis.call('HSET', key, 'p:' .. index, begin + tokens, 'f:' .. index, table.concat(begins, ' '))
  local from, to = redis.call('HGET', key, 'partial_oldest'), redis.call('HGET', key, 'newest')
  redis.call('HSET', key, 'partial_oldest', math.min(from or oldest, oldest), 'newest', math.max(to or newest, newest))
  note_age(gid, oldest)
end

-- Saves fragments of unfinished samples: ARGV[first], ... hold index, begin, tokens, oldest step, newest step, payload of each.
-- All or none. What was finished meanwhile is left out.
local function save_fragments(gid, first)
  for at = first, #ARGV, 6 do
    local _, _, is_boundary = before_fragment(gid, ARGV[at], tonumber(ARGV[at + 1]))
    if not is_boundary and redis.call('HEXISTS', group_key(gid), 'h:' .. ARGV[at]) == 0 then
      return fail('FAILED_PRECONDITION', 'progress of sample ' .. ARGV[at] .. ' of ' .. gid .. ' begins at token ' ..
        ARGV[at + 1] .. ', where no fragment begins or ends; ' .. number_in(group_key(gid), 'p:' .. ARGV[at]) .. ' are saved')
    end
  end
  for at = first, #ARGV, 6 do
    if redis.call('HEXISTS', group_key(gid), 'h:' .. ARGV[at]) == 0 then
      save_fragment(gid, ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]),
        tonumber(ARGV[at + 4]), ARGV[at + 5])
    end
  end
end

local function forget_fragments(gid, index)
  redis.call('DEL', partial_key(gid, index))
  redis.call('HDEL', group_key(gid), 'p:' .. index, 'f:' .. index)
end

local function partial_tokens(gid)
  local total = 0
  for index = 0, group_size(gid) - 1 do total = total + number_in(group_key(gid), 'p:' .. index) end
  return total
end

local function all_tokens(gid)
  local total = partial_tokens(gid)
  for index = 0, group_size(gid) - 1 do
    local header = redis.call('HGET', group_key(gid), 'h:' .. index)
    if header then total = total + cjson.decode(header)[2] end
  end
  return total
end

-- Ends the life of a group that is not trained on.
local function finish(gid, from, to, reason, counted_as)
  even_if_full()
  redis.call('HSET', group_key(gid), 'reason', reason)
  redis.call('HINCRBY', P .. ledger_of(gid) .. ':' .. string.lower(to) .. '_reasons', counted_as or reason, 1)
  if to ~= 'DROPPED' then redis.call('HINCRBY', P .. 'discarded', to, all_tokens(gid)) end
  retain(gid)
  move(gid, from, to)
end

-- The age of what is kept of a group, without that of a lease.
local function recount_age(gid)
  local key = group_key(gid)
  local oldest = tonumber(redis.call('HGET', key, 'partial_oldest'))
  for index = 0, group_size(gid) - 1 do
    local header = redis.call('HGET', key, 'h:' .. index)
    if header then oldest = math.min(oldest or cjson.decode(header)[5], cjson.decode(header)[5]) end
  end
  redis.call('HDEL', key, 'oldest')
  redis.call('ZREM', AGING, gid)
  if oldest then note_age(gid, oldest) end
end

-- Throws the tokens of unfinished samples away, and counts them.
local function discard_partial(gid, reason)
  redis.call('HINCRBY', P .. 'discarded', reason, partial_tokens(gid))
  for index = 0, group_size(gid) - 1 do forget_fragments(gid, index) end
  redis.call('HDEL', group_key(gid), 'partial_oldest', 'newest')
  recount_age(gid)
end

-- Ends a lease without completing the group.
local function end_lease(gid, failure)
  local key = group_key(gid)
  redis.call('ZREM', LEASES, gid)
  redis.call('HDEL', key, 'token')
  recount_age(gid)
  if failure ~= '' then
    redis.call('HSET', key, 'reason', failure)
    if redis.call('HINCRBY', key, 'failures', 1) >= policy('max_attempts') then
      return finish(gid, 'GENERATING', 'FAILED', failure, 'MAX_ATTEMPTS')
    end
  end
  if ledger_of(gid) == 'eval' then return move(gid, 'GENERATING', 'WAITING') end
  if is_too_old(gid) then return finish(gid, 'GENERATING', 'STALE', 'AGE') end
  return move(gid, 'GENERATING', partial_tokens(gid) > 0 and 'PARTIAL' or 'WAITING')
end

-- True if no training group may be generated: the batch that could use it is sealed, or what came now would be too old.
local function is_closed()
  local sealed, step = number_in(RUN, 'sealed'), step_of_run()
  return sealed >= number_in(RUN, 'num_rollout') or step + policy('max_sample_age') < sealed
    or (policy('max_staleness') == 0 and sealed > step)
end

-- The step of an evaluation group, from its id.
local function evaluated_step(gid) return tonumber(string.sub(gid, 2, 7)) end

-- Returns a function of a group and its worker that says why its lease must stop; '' if it may go on.
local function stop_reasons()
  local stopped, closed = redis.call('HGET', RUN, 'desired_state') == 'STOPPED', is_closed()
  local live, drained = number_in(RUN, 'live_step'), redis.call('SCARD', DRAINED) > 0
  return function(gid, worker)
    if stopped then return 'RUN_STOPPED' end
    if drained and redis.call('SISMEMBER', DRAINED, worker) == 1 then return 'DRAINING' end
    if ledger_of(gid) == 'eval' then return evaluated_step(gid) ~= live and 'VERSION_GONE' or '' end
    if closed then return 'SEALED' end
    return is_too_old(gid) and 'TOO_OLD' or ''
  end
end
