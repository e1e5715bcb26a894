-- Give up the failed head of a lane: it becomes a dead letter, and its lane resumes when the owner finds it gone.
--
-- KEYS  n, slices, ids, dead, dead:t; s, f, x of its slice
-- ARGV  name, g, index, idh, its dead letter, time of its death in ms, its address as the index holds it
-- returns 'ok' | 'too late' (it is being delivered) | 'gone' (it is not there any more)
-- keeps: one step, so there is never a moment without task and dead letter, or with both. Its id leaves the index: this
--   shows the owner that the lane need not wait.
local n, slices, ids, dead, dead_times, s, f, x = unpack(KEYS)
local index, idh = ARGV[3], ARGV[4]
if redis.call('HGET', ids, idh) ~= ARGV[7] then return 'gone' end
if not same_incarnation(slices, ARGV[1], tonumber(ARGV[2])) then return 'gone' end
local row = redis.call('LINDEX', s, index)
if not row or #row < 21 or string.sub(row, 6, 21) ~= idh then return 'gone' end
if math.floor(string.byte(row, 5) / 8) % 2 == 1 or redis.call('GETBIT', x, index) == 1 then return 'gone' end
if redis.call('GETBIT', f, index) == 1 then return 'too late' end
redis.call('HSET', dead, idh, ARGV[5])
redis.call('ZADD', dead_times, ARGV[6], idh)
-- The header stays: a replay leaves its mark there.
redis.call('LSET', s, index, string.sub(row, 1, 4) .. string.char(string.byte(row, 5) % 8 + 8) .. idh)
redis.call('SETBIT', x, index, 1)
redis.call('HDEL', ids, idh)
redis.call('HINCRBY', n, 'dead', 1)
return 'ok'
