-- Put notices into the box of their channel, and say when the digest that sends them is due.
--
-- KEYS  box, seen
-- ARGV  wait in ms before a digest, shortest time between two, how long ids are known, how old an unsent window may be,
--       most notices that are kept, then per notice: idh, kind, notice
-- returns when the digest is due, in ms
-- keeps: a notice whose id is known is not added again. The box holds `due`, the open window, `last`, the one before, and
--   per window its notices and the counts of their kinds. Beyond the most, notices are only counted; a breaker
--   explains the failures around it, and has as much room again.
local now = math.floor(now_us() / 1000)
local box, seen = KEYS[1], KEYS[2]
local known_ms, most = tonumber(ARGV[3]), tonumber(ARGV[5])
local due = tonumber(redis.call('HGET', box, 'due') or '0')
if due < now - tonumber(ARGV[4]) then
  -- There is no open window, or its digest was cancelled.
  local last = tonumber(redis.call('HGET', box, 'last') or '0')
  due = math.max(now + tonumber(ARGV[1]), math.min(last, now) + tonumber(ARGV[2]))
  redis.call('HSET', box, 'due', string.format('%.0f', due))
end
local window = string.format('%.0f', due)
local kept = redis.call('HLEN', box)
for i = 6, #ARGV - 2, 3 do
  if not redis.call('ZSCORE', seen, ARGV[i]) then
    redis.call('ZADD', seen, now, ARGV[i])
    redis.call('HINCRBY', box, window .. '+' .. ARGV[i + 1], 1)
    if kept < most or (ARGV[i + 1] == 'breaker' and kept < 2 * most) then
      redis.call('HSET', box, window .. '=' .. ARGV[i], ARGV[i + 2])
      kept = kept + 1
    end
  end
end
local old = redis.call('ZRANGE', seen, '-inf', now - known_ms, 'BYSCORE', 'LIMIT', 0, 4000)
if #old > 0 then redis.call('ZREM', seen, unpack(old)) end
redis.call('PEXPIRE', seen, known_ms)
redis.call('PEXPIRE', box, 30 * 86400000)
return due
