-- Write the plan: which node shall own which partition.
--
-- KEYS  leader, plan
-- ARGV  id, nonce and term of the leader, version the new plan was made from, owners
-- returns 'ok', 'deposed' (another leads now) or 'changed' (the plan is not the one it was made from)
-- keeps: of two leaders that meet, one writes; versions only grow
local lead = redis.call('HMGET', KEYS[1], 'id', 'nonce', 'term')
if lead[1] ~= ARGV[1] or lead[2] ~= ARGV[2] or tonumber(lead[3]) ~= tonumber(ARGV[3]) then return 'deposed' end
local version = tonumber(redis.call('HGET', KEYS[2], 'version') or 0)
if version ~= tonumber(ARGV[4]) then return 'changed' end
redis.call('HSET', KEYS[2], 'version', version + 1, 'term', ARGV[3], 'owners', ARGV[5])
return 'ok'
