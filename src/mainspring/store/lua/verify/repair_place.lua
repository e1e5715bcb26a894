-- Add a list to the live slices, or correct its score.
--
-- KEYS  slices, s, n
-- ARGV  name, current score ('' = none), new score
-- returns 'changed' (it has another score by now), 'gone' (there is no list), or how many entries it has
-- keeps: the list and its bits are unchanged, so done tasks stay done and the rest fires. The new score is a new
--   incarnation: an owner that knew the slice before reads it again.
local score = redis.call('ZSCORE', KEYS[1], ARGV[1])
if tonumber(score) ~= tonumber(ARGV[2]) then return 'changed' end
local entries = redis.call('LLEN', KEYS[2])
if entries == 0 then return 'gone' end
redis.call('ZADD', KEYS[1], ARGV[3], ARGV[1])
redis.call('HINCRBY', KEYS[3], 'repairs', 1)
return entries
