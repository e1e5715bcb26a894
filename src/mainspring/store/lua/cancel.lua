-- Cancel tasks of one partition by address.
--
-- KEYS  n, slices; s, f, x of each slice; ids of each bucket
-- ARGV  slices, buckets, then
--         per slice: name, g, count, then count times: index, idh, bucket (from 1; 0 = has no place in the index)
-- returns per task: cancelled | too late | gone | the address (14 bytes) it was moved to
-- keeps: after 'cancelled' the task never fires; after its begin the answer is 'too late'.
-- The entry shrinks to four bytes of its idh: memory comes back at once, and begin can still recognise it. One that
-- was sent again keeps its header, so that its other copies are still known for what they are.
local n, slices = KEYS[1], KEYS[2]
local groups, buckets = tonumber(ARGV[1]), tonumber(ARGV[2])
local a, out, cancelled, unindex = 2, {}, 0, {}

local function rows_of(s, at, count)
  local low, high = tonumber(ARGV[at]), tonumber(ARGV[at + (count - 1) * 3])
  -- Sorted by the caller. Dense cancels read the stretch at once; scattered ones would read too much.
  if high - low < count * 4 then
    local rows = redis.call('LRANGE', s, low, high)
    return function(index) return rows[index - low + 1] end
  end
  return function(index) return redis.call('LINDEX', s, index) end
end

local function has_mark(row, mark) return math.floor(string.byte(row, 5) / mark) % 2 == 1 end

local function is_set(bits, index)
  return math.floor((string.byte(bits, math.floor(index / 8) + 1) or 0) / 2 ^ (7 - index % 8)) % 2 == 1
end

local function cancel_one(s, x, row, fired, index, idh, bucket)
  if not row then return 'gone' end
  if #row == 4 then return row == string.sub(idh, 1, 4) and 'cancelled' or 'gone' end
  if string.sub(row, 6, 21) ~= idh then return 'gone' end
  -- Its other copy may have been named in this same call, after the rows were read.
  if is_resent(row) then row = redis.call('LINDEX', s, index) end
  if has_mark(row, 16) and #row == 35 then return string.sub(row, 22, 35) end
  if has_mark(row, 8) and #row == 21 then return 'cancelled' end
  local first = first_copy(s, row, index)
  if is_set(fired, first) then return 'too late' end
  if is_resent(row) then bury(s, row, index, first, 8, '')
  else redis.call('LSET', s, index, string.sub(idh, 1, 4)) end
  redis.call('SETBIT', x, first, 1)
  if bucket > 0 then
    local list = unindex[bucket] or {}
    list[#list + 1], unindex[bucket] = idh, list
  end
  cancelled = cancelled + 1
  return 'cancelled'
end

for group = 1, groups do
  local name, g, count = ARGV[a + 1], tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3])
  local keys = 3 + (group - 1) * 3
  if same_incarnation(slices, name, g) then
    local row_at = rows_of(KEYS[keys], a + 4, count)
    local fired = redis.call('GET', KEYS[keys + 1]) or ''
    local last
    for i = 0, count - 1 do
      local at = a + 4 + i * 3
      local index = tonumber(ARGV[at])
      -- Named twice in one call (they are sorted): the rows were read before the first of them was cancelled.
      if index ~= last or ARGV[at + 1] ~= ARGV[at - 2] then
        out[#out + 1] =
          cancel_one(KEYS[keys], KEYS[keys + 2], row_at(index), fired, index, ARGV[at + 1], tonumber(ARGV[at + 2]))
      else
        out[#out + 1] = out[#out]
      end
      last = index
    end
  else
    for _ = 1, count do out[#out + 1] = 'gone' end
  end
  a = a + 3 + count * 3
end
for bucket, list in pairs(unindex) do
  for first = 1, #list, 1000 do
    redis.call('HDEL', KEYS[2 + groups * 3 + bucket], unpack(list, first, math.min(first + 999, #list)))
  end
end
if cancelled > 0 then redis.call('HINCRBY', n, 'cancelled', cancelled) end
return out
