-- Cancel tasks of one partition by address.
--
-- KEYS  n, slices; s, f, x of each slice; ids of each bucket
-- ARGV  slices, buckets, then
--         per slice: name, g, count, then count times: index, idh, bucket (from 1; 0 = has no place in the index)
-- returns per task: cancelled | too late | gone | the address (14 bytes) it was moved to
-- keeps: after 'cancelled' the task never fires; after its begin the answer is 'too late'.
-- The entry shrinks to four bytes of its idh: memory comes back at once, and begin can still recognise it.
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

local function cancel_one(keys, row, fired, index, idh, bucket)
  if not row then return 'gone' end
  if #row == 4 then return row == string.sub(idh, 1, 4) and 'cancelled' or 'gone' end
  if string.sub(row, 6, 21) ~= idh then return 'gone' end
  if #row == 35 and math.floor(string.byte(row, 5) / 16) % 2 == 1 then return string.sub(row, 22, 35) end
  local byte = string.byte(fired, math.floor(index / 8) + 1) or 0
  if math.floor(byte / 2 ^ (7 - index % 8)) % 2 == 1 then return 'too late' end
  redis.call('LSET', KEYS[keys], index, string.sub(idh, 1, 4))
  redis.call('SETBIT', KEYS[keys + 2], index, 1)
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
    for i = 0, count - 1 do
      local at = a + 4 + i * 3
      local index = tonumber(ARGV[at])
      out[#out + 1] = cancel_one(keys, row_at(index), fired, index, ARGV[at + 1], tonumber(ARGV[at + 2]))
    end
  else
    for _ = 1, count do out[#out + 1] = 'gone' end
  end
  a = a + 3 + count * 3
end
for bucket, list in pairs(unindex) do redis.call('HDEL', KEYS[2 + groups * 3 + bucket], unpack(list)) end
if cancelled > 0 then redis.call('HINCRBY', n, 'cancelled', cancelled) end
return out
