-- ARGV: gid, token, ttl_ms, then fragments as save_fragments has them. Returns why the lease must stop, or ''.
local key = group_key(ARGV[1])
if redis.call('HGET', key, 'token') ~= ARGV[2] then return fail('ABORTED', 'the lease of ' .. ARGV[1] .. ' is lost') end
local refused = save_fragments(ARGV[1], 4)
if refused then return refused end
if #ARGV < 4 then even_if_full() end
redis.call('ZADD', LEASES, now_ms() + tonumber(ARGV[3]), ARGV[1])
return stop_reasons()(ARGV[1], redis.call('HGET', key, 'worker'))
