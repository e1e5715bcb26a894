-- Write the plan: which node shall own which partition.
--
-- KEYS  leader, plan
-- ARGV  id, nonce and term of the leader, version the new plan was made from, owners
-- returns 'ok', 'deposed' (another leads now) or 'changed' (the plan is not the one it was made from)
-- keeps: of two leaders that meet, one writes; versions only grow. What is no number counts as 0, as it does for
--   those who read it: a plan that somebody spoiled can be written anew.
local function whole(raw) return tonumber(string.match(raw or '', '^%d+$')) or 0 end
local lead = redis.call('HMGET', KEYS[1], 'id', 'nonce', 'term')
if lead[1] ~= ARGV[1] or lead[2] ~= ARGV[2] or whole(lead[3]) ~= whole(ARGV[3]) then return 'deposed' end
local version = whole(redis.call('HGET', KEYS[2], 'version'))
if version ~= whole(ARGV[4]) then return 'changed' end
redis.call('HSET', KEYS[2], 'version', version + 1, 'term', ARGV[3], 'owners', ARGV[5])
return 'ok'
