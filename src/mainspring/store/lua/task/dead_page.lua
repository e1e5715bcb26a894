-- Return a page of a partition's dead letters in the order in which they died.
--
-- KEYS  dead:t
-- ARGV  'newest' | 'oldest' first, time in ms and idh ('' = before all of that time) from which to continue, the time at
--       which to end, limit
--   newest: dead letters before (time, idh), back to the end time; oldest: those after (time, idh), before the end time
-- returns {idh, time ...}, always from old to new
-- Finds the start by bisection: thousands may have died in one millisecond.
local key, newest, count = KEYS[1], ARGV[1] == 'newest', tonumber(ARGV[5])

-- The servers order members byte by byte; Lua's own comparison depends on the locale.
local function less(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

local function how_many_before(time, idh)
  local first = redis.call('ZCOUNT', key, '-inf', '(' .. time)
  if idh == '' then return first end
  local last = redis.call('ZCOUNT', key, '-inf', time)
  while first < last do
    local middle = math.floor((first + last) / 2)
    if less(redis.call('ZRANGE', key, middle, middle)[1], idh) then first = middle + 1 else last = middle end
  end
  return first
end

local start, stop
if newest then
  stop = how_many_before(ARGV[2], ARGV[3]) - 1
  start = math.max(how_many_before(ARGV[4], ''), stop - count + 1)
else
  start = how_many_before(ARGV[2], ARGV[3])
  if ARGV[3] ~= '' and redis.call('ZRANK', key, ARGV[3]) == start then start = start + 1 end
  stop = math.min(how_many_before(ARGV[4], '') - 1, start + count - 1)
end
if stop < start then return {} end
return redis.call('ZRANGE', key, start, stop, 'WITHSCORES')
