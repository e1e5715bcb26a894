-- Free a lane that waits for a task which does not exist.
--
-- KEYS  held, ids, own, fence
-- ARGV  lane, the head it waits for as stored, its idh, that id's address in the index ('' = none) when it was
--         found missing
-- returns 'changed' (it waits for another task, or its head has a place again) or 'ok'
-- keeps: every retry registers its place, so as long as the index is unchanged the head has not come back. The owner
--   holds the lane in memory, so it has to read again.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 'changed' end
if (redis.call('HGET', KEYS[2], ARGV[3]) or '') ~= ARGV[4] then return 'changed' end
redis.call('HDEL', KEYS[1], ARGV[1])
unseat(KEYS[3], KEYS[4])
return 'ok'
