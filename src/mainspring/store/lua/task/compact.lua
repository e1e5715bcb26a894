-- Cancel many tasks of slices of which nothing was begun, if less than half is left then: the remaining rows are written
-- into a new list, under another incarnation, and the index gets the new places. Nothing is left of the others.
--
-- KEYS  n, slices, ids, held, off; s, f, d, x of each slice
-- ARGV  time in ms (6 bytes), ids kept in `off`, then per slice: name, g, another g, address prefix, bitmap of the rows to cancel, their idhs (16 bytes each, in the
--         order of the rows; all looked up in the index)
-- returns per slice 1, or 0 if it was refused and is unchanged: cancel then handles each row by itself
-- keeps: an owner that has read the old list cannot write to it: it has written nothing of this incarnation yet, so its
--   next call carries the proof and is refused as stale. Handles find the remaining tasks through the index.
-- Refused where this does not hold: rows that only a handle knows, puts that were sent twice (a copy may still come),
-- and partitions with a lane that waits for a retry (the owner frees it when it reads the tombstone).
local n, slices, ids = KEYS[1], KEYS[2], KEYS[3]
local places, cancelled, out = (#KEYS - 5) / 4, 0, {}
local sub, byte_of, floor = string.sub, string.byte, math.floor

local function bit(bits, index)
  return floor((byte_of(bits, floor(index / 8) + 1) or 0) / 2 ^ (7 - index % 8)) % 2
end

-- Return the rows that stay, and the rows cancelled or moved before; nil if a row to cancel is among the latter.
local function others(mask, x, length)
  local stay, dead = {}, {}
  for at = 0, math.ceil(length / 8) - 1 do
    if byte_of(mask, at + 1) ~= 255 or (byte_of(x, at + 1) or 0) ~= 0 then
      for index = at * 8, math.min(at * 8 + 7, length - 1) do
        local wanted, over = bit(mask, index) == 1, bit(x, index) == 1
        if wanted and over then return nil end
        if over then dead[#dead + 1] = index elseif not wanted then stay[#stay + 1] = index end
      end
    end
  end
  return stay, dead
end

-- Return a reader of single rows, or of all at once if many are wanted.
local function reader(s, wanted, length)
  if wanted * 5 < length then return function(index) return redis.call('LINDEX', s, index) end end
  local rows = redis.call('LRANGE', s, 0, -1)
  return function(index) return rows[index + 1] end
end

local function is_resent(row) return #row > 20 and floor(byte_of(row, 5) / 4) % 2 == 1 end

-- Return the rows that stay and their idhs; nil if one of them must not be moved, or a tombstone must be kept.
local function staying(s, stay, dead, head, length)
  local row_at = reader(s, #stay + #dead, length)
  for _, index in ipairs(dead) do
    if is_resent(row_at(index)) then return nil end
  end
  local rows, idhs, at = {}, {}, {}
  for i, index in ipairs(stay) do
    local row = row_at(index)
    if #row <= 21 or byte_of(row, 5) % 2 == 0 or is_resent(row) then return nil end
    rows[i], idhs[i], at[i] = row, sub(row, 6, 21), head .. struct.pack('>I4', index)
  end
  local known = #rows > 0 and redis.call('HMGET', ids, unpack(idhs)) or {}
  for i = 1, #rows do
    if known[i] ~= at[i] then return nil end
  end
  return rows, idhs
end

local function rewrite(s, x, name, score, head, rows, idhs)
  redis.call('DEL', s, x)
  if #rows == 0 then
    redis.call('ZREM', slices, name)
    return
  end
  redis.call('RPUSH', s, unpack(rows))
  redis.call('ZADD', slices, score, name)
  local pairs_ = {}
  for i = 1, #rows do pairs_[i * 2 - 1], pairs_[i * 2] = idhs[i], head .. struct.pack('>I4', i - 1) end
  redis.call('HSET', ids, unpack(pairs_))
end

local function forget(idhs, count)
  local gone = {}
  for i = 1, count do gone[i] = sub(idhs, i * 16 - 15, i * 16) end
  for first = 1, count, 2000 do redis.call('HDEL', ids, unpack(gone, first, math.min(first + 1999, count))) end
  note_cancelled(KEYS[5], gone, count, ARGV[1], tonumber(ARGV[2]))
end

local function address_head(prefix, g) return prefix .. struct.pack('>I3', (g - floor(g)) * 1048576) end

local function compact(key, arg)
  local s, x, name, g, other = KEYS[key + 1], KEYS[key + 4], ARGV[arg + 1], tonumber(ARGV[arg + 2]), tonumber(ARGV[arg + 3])
  local prefix, mask, gone = ARGV[arg + 4], ARGV[arg + 5], ARGV[arg + 6]
  local count, length = #gone / 16, redis.call('LLEN', s)
  if g == other or count * 4 < length or length > 10000 then return 0 end
  if not same_incarnation(slices, name, g) or redis.call('EXISTS', KEYS[key + 2], KEYS[key + 3]) > 0 then return 0 end
  local stay, dead = others(mask, redis.call('GET', x) or '', length)
  if not stay or #stay * 2 > length or #stay > 3000 or #stay + #dead + count ~= length then return 0 end
  local last = length - 1
  while bit(mask, last) == 0 do last = last - 1 end
  if sub(redis.call('LINDEX', s, last), 6, 21) ~= sub(gone, -16) then return 0 end
  local rows, idhs = staying(s, stay, dead, address_head(prefix, g), length)
  if not rows then return 0 end
  rewrite(s, x, name, ARGV[arg + 3], address_head(prefix, other), rows, idhs)
  forget(gone, count)
  cancelled = cancelled + count
  return 1
end

local held = redis.call('EXISTS', KEYS[4]) == 1
for place = 1, places do out[place] = held and 0 or compact(4 * place + 1, 6 * place - 4) end
if cancelled > 0 then
  redis.call('HINCRBY', n, 'cancelled', cancelled)
  -- A hash that was large keeps its table; written again it takes only the memory it needs, and a small one is packed. Not
  -- worthwhile while much is left.
  local left = redis.call('HLEN', ids)
  if left > 0 and left <= (left <= 512 and cancelled * 4 or cancelled) and redis.call('OBJECT', 'ENCODING', ids) == 'hashtable' then
    local all = redis.call('HGETALL', ids)
    redis.call('DEL', ids)
    for first = 1, #all, 4000 do redis.call('HSET', ids, unpack(all, first, math.min(first + 3999, #all))) end
  end
end
return out
