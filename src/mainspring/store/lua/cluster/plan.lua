-- Write the plan: which node is to own which partition.
--
-- KEYS  leader, plan
-- ARGV  id, nonce and term of the leader, version the new plan was made from, owners
-- returns 'ok', 'deposed' (another node leads now) or 'changed' (the plan is not the one the new plan was made from)
-- keeps: if two nodes lead at the same time, one writes; versions only grow. A value that is not a number counts as 0, as
--   it does for readers, so that a damaged plan can be overwritten.
local function whole(raw) return tonumber(string.match(raw or '', '^%d+$')) or 0 end
local lead = redis.call('HMGET', KEYS[1], 'id', 'nonce', 'term')
if lead[1] ~= ARGV[1] or lead[2] ~= ARGV[2] or whole(lead[3]) ~= whole(ARGV[3]) then return 'deposed' end
local version = whole(redis.call('HGET', KEYS[2], 'version'))
if version ~= whole(ARGV[4]) then return 'changed' end
redis.call('HSET', KEYS[2], 'version', version + 1, 'term', ARGV[3], 'owners', ARGV[5])
return 'ok'
