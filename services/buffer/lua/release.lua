-- ARGV: gid, token, error, then fragments as save_fragments has them
if redis.call('HGET', group_key(ARGV[1]), 'token') ~= ARGV[2] then return 0 end
local refused = save_fragments(ARGV[1], 4)
if refused then return refused end
end_lease(ARGV[1], ARGV[3])
return 1
