-- ARGV: batch. Sets what happened since the last seal aside for this batch. Returns {it, now in ms}.
local key = P .. 'interval:' .. ARGV[1]
if redis.call('EXISTS', key) == 0 and redis.call('EXISTS', INTERVAL) == 1 then redis.call('RENAME', INTERVAL, key) end
return {redis.call('HGETALL', key), now_ms()}
