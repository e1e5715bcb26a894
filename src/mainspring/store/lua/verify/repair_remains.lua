-- Remove the remains of a slice without entries: its bits, and its name among the live slices.
--
-- KEYS  slices, s, f, d, x
-- ARGV  name, current score ('' = none)
-- returns 'changed' (it has entries, or another score, by now) or 'ok'
-- keeps: nothing is removed while there is an entry. Remaining bits would make new tasks of that time look finished.
local score = redis.call('ZSCORE', KEYS[1], ARGV[1])
if tonumber(score) ~= tonumber(ARGV[2]) then return 'changed' end
if redis.call('EXISTS', KEYS[2]) == 1 then return 'changed' end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('UNLINK', KEYS[3], KEYS[4], KEYS[5])
return 'ok'
