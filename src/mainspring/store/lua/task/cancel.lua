-- Cancel tasks of one partition by address.
--
-- KEYS  n, slices, ids, off; s, f, x of each slice
-- ARGV  time in ms (6 bytes), ids kept in `off`, slices, then per slice: name, g, count, then count times: index, idh (sorted by index)
-- returns {position, answer ...} of tasks that were not cancelled just now, positions counted from 1; answer:
--   cancelled (before) | too late | gone | the address (14 bytes) it was moved to
-- keeps: after 'cancelled' the task never fires; after its begin the answer is 'too late'.
-- Ids of entries that are marked as indexed leave the index: this shows the owner that a lane need not wait. They are
-- noted in `off` in the same step, so that a cancel whose reply was lost can be repeated.
-- The entry shrinks to four bytes of its idh: memory is freed at once, and begin can still recognise it. A task that
-- was sent again keeps its header, so that its other copies are still recognised.
local n, slices, ids = KEYS[1], KEYS[2], KEYS[3]
local groups = tonumber(ARGV[3])
local a, at, out, cancelled = 3, 0, {}, 0
local gone, forgotten = {}, 0  -- ids that leave the index, and how many

local function has_mark(row, mark) return math.floor(string.byte(row, 5) / mark) % 2 == 1 end

local function is_set(bits, index)
  return math.floor((string.byte(bits, math.floor(index / 8) + 1) or 0) / 2 ^ (7 - index % 8)) % 2 == 1
end

-- Return the reason against cancelling this row, or nil.
local function refusal(row, idh)
  if not row then return 'gone' end
  if #row == 4 then return row == string.sub(idh, 1, 4) and 'cancelled' or 'gone' end
  if string.sub(row, 6, 21) ~= idh then return 'gone' end
  if has_mark(row, 16) and #row == 35 then return string.sub(row, 22, 35) end
  if has_mark(row, 8) and #row == 21 then return 'cancelled' end
  return nil
end

local function answer(position, word)
  out[#out + 1] = position
  out[#out + 1] = word
end

-- Cancel scattered tasks, one by one.
local function cancel_one(s, x, fired, index, idh)
  local row = redis.call('LINDEX', s, index)
  local refused = refusal(row, idh)
  if refused then return refused end
  local first = first_copy(s, row, index)
  if is_set(fired, first) then return 'too late' end
  local mark = fired ~= '' and is_resent(row) and mark_of(s, idh)
  if mark then return string.sub(mark, 22, 35) end
  if is_resent(row) then bury(s, row, index, first, 8, '')
  else redis.call('LSET', s, index, string.sub(idh, 1, 4)) end
  redis.call('SETBIT', x, first, 1)
  cancelled = cancelled + 1
  if has_mark(row, 1) then gone[forgotten + 1], forgotten = idh, forgotten + 1 end
  return nil
end

-- Cancel many tasks of one slice: write the whole list again, which costs less than finding each row in it. Return false,
-- with nothing done, if that is not worthwhile or one of the tasks was sent twice.
local function cancel_many(s, x, fired, arg, count)
  local length = redis.call('LLEN', s)
  if count < 16 or count * 4 < length then return false end
  local rows, bits, bytes = redis.call('LRANGE', s, 0, -1), redis.call('GET', x) or '', {}
  local sub, byte_of, before, known, refused = string.sub, string.byte, cancelled, forgotten, {}
  for i = 0, count - 1 do
    local index, idh = tonumber(ARGV[arg + i * 2]), ARGV[arg + i * 2 + 1]
    local row = rows[index + 1]
    local flags = row and byte_of(row, 5) or 0
    if row and #row > 20 and math.floor(flags / 4) % 2 == 1 then
      cancelled, forgotten = before, known
      return false
    end
    if row and #row > 20 and flags % 32 < 4 and sub(row, 6, 21) == idh and (fired == '' or not is_set(fired, index)) then
      rows[index + 1] = sub(idh, 1, 4)
      local byte = (index - index % 8) / 8 + 1
      bytes[byte] = (bytes[byte] or byte_of(bits, byte) or 0) + 2 ^ (7 - index % 8)
      cancelled = cancelled + 1
      if flags % 2 == 1 then gone[forgotten + 1], forgotten = idh, forgotten + 1 end
    else
      refused[#refused + 1], refused[#refused + 2] = at + i + 1, refusal(row, idh) or 'too late'
    end
  end
  for i = 1, #refused, 2 do answer(refused[i], refused[i + 1]) end
  if cancelled == before then return true end
  -- Append the new rows, then trim the old ones. Not DEL first: while its slot is moving to another server, a deleted key
  -- cannot be created again here, and the script would end with the list lost.
  for first = 1, length, 4000 do redis.call('RPUSH', s, unpack(rows, first, math.min(first + 3999, length))) end
  redis.call('LTRIM', s, length, -1)
  local all = {}
  for byte = 1, math.ceil(length / 8) do all[byte] = string.char(bytes[byte] or byte_of(bits, byte) or 0) end
  redis.call('SET', x, table.concat(all))
  return true
end

for group = 1, groups do
  local name, g, count = ARGV[a + 1], tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3])
  local key = 4 + (group - 1) * 3
  local s, x = KEYS[key + 1], KEYS[key + 3]
  local arg = a + 4
  if not same_incarnation(slices, name, g) then
    for i = 1, count do answer(at + i, 'gone') end
  else
    local fired = redis.call('GET', KEYS[key + 2]) or ''
    if not cancel_many(s, x, fired, arg, count) then
      for i = 0, count - 1 do
        local refused = cancel_one(s, x, fired, tonumber(ARGV[arg + i * 2]), ARGV[arg + i * 2 + 1])
        if refused then answer(at + i + 1, refused) end
      end
    end
  end
  a, at = a + 3 + count * 2, at + count
end
for first = 1, forgotten, 1000 do redis.call('HDEL', ids, unpack(gone, first, math.min(first + 999, forgotten))) end
note_cancelled(KEYS[4], gone, forgotten, ARGV[1], tonumber(ARGV[2]))
if cancelled > 0 then redis.call('HINCRBY', n, 'cancelled', cancelled) end
return out
