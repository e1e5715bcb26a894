-- Occurrences of schedules begin, or are skipped: advance their chains and write the following occurrences.
--
-- KEYS from `key` on: next, ids, n, slices, s of each place, x of each slice with a skipped one
-- ARGV from `arg` on: places, slices with skipped ones; per place: name, score, address prefix; then per occurrence:
--   schedule, the 12 bytes its next value must still begin with, the new value, entry, packed: place (0 = none),
--   x (0 = it runs, otherwise which of the keys), index; for a skipped one also its idh
-- The id of a skipped occurrence becomes free, like that of a cancelled task: it did not run, and a backfill may run it.
-- A chain that does not begin with these bytes was edited, or has advanced before: it is left alone. Returns the packed
-- numbers of those, counted from 0.
-- Rows are appended together, slice by slice: a call for each of a hundred thousand would take seconds.
local OCCURRENCE_ARGS, AT_ONCE = 5, 1000

local function in_parts(list, each)
  for first = 1, #list, AT_ONCE do each(first, math.min(first + AT_ONCE - 1, #list)) end
end

-- For a repeated call: a chain with another value than this call writes was left alone, or edited since.
local function not_moved(count, key, arg)
  local first, left_alone = arg + 2 + ARGV[arg + 1] * 3, {}
  for i = 0, count - 1 do
    local at = first + i * OCCURRENCE_ARGS
    if redis.call('HGET', KEYS[key + 1], ARGV[at + 1]) ~= ARGV[at + 3] then
      left_alone[#left_alone + 1] = struct.pack('>I2', i)
    end
  end
  return table.concat(left_alone)
end

local function put_next(count, key, arg)
  local next_key, ids, n, slices = KEYS[key + 1], KEYS[key + 2], KEYS[key + 3], KEYS[key + 4]
  local places = tonumber(ARGV[arg + 1])
  local first, names, claims, skipped = arg + 2 + places * 3, {}, {}, 0
  for i = 1, count do names[i] = ARGV[first + (i - 1) * OCCURRENCE_ARGS + 1] end
  in_parts(names, function(low, high)
    local values = redis.call('HMGET', next_key, unpack(names, low, high))
    for i = low, high do claims[i] = string.sub(values[i - low + 1] or '', 1, 12) end
  end)
  local moved, rows, idhs, gone, left_alone = {}, {}, {}, {}, {}
  local wanted, wanted_rows, wanted_places, w = {}, {}, {}, 0
  for place = 1, places do rows[place], idhs[place] = {}, {} end
  local where, place, x, index
  for i = 1, count do
    local at = first + (i - 1) * OCCURRENCE_ARGS
    if ARGV[at + 5] ~= where then -- usually the same as before
      where = ARGV[at + 5]
      place, x, index = struct.unpack('>I2I2I4', where)
    end
    if claims[i] == ARGV[at + 2] then
      moved[#moved + 1], moved[#moved + 2] = names[i], ARGV[at + 3]
      if x > 0 then gone[#gone + 1] = string.sub(where, 9) end
      if place > 0 then
        w = w + 1
        wanted[w], wanted_rows[w], wanted_places[w] = string.sub(ARGV[at + 4], 6, 21), ARGV[at + 4], place
      end
    else
      left_alone[#left_alone + 1] = struct.pack('>I2', i - 1)
    end
    if x > 0 then
      skipped = skipped + 1 - redis.call('SETBIT', KEYS[key + 4 + places + x], index, 1)
    end
  end
  -- An id that is in use has run already, or waits: do not put it a second time.
  in_parts(wanted, function(low, high)
    local known = redis.call('HMGET', ids, unpack(wanted, low, high))
    for i = low, high do
      if not known[i - low + 1] then
        local at = wanted_places[i]
        local there = rows[at]
        there[#there + 1], idhs[at][#there + 1] = wanted_rows[i], wanted[i]
      end
    end
  end)
  local accepted = 0
  for place = 1, places do
    if #rows[place] > 0 then
      local at = arg + 2 + (place - 1) * 3
      local head = ARGV[at + 3] .. struct.pack('>I3', open_slice(slices, ARGV[at + 1], ARGV[at + 2]))
      local s = KEYS[key + 4 + place]
      in_parts(rows[place], function(low, high)
        local index = redis.call('RPUSH', s, unpack(rows[place], low, high)) - (high - low + 1)
        local pairs_ = {}
        for i = low, high do
          pairs_[#pairs_ + 1], pairs_[#pairs_ + 2] = idhs[place][i], struct.pack('>c10I4', head, index + i - low)
        end
        redis.call('HSET', ids, unpack(pairs_))
      end)
      accepted = accepted + #rows[place]
    end
  end
  in_parts(moved, function(low, high) redis.call('HSET', next_key, unpack(moved, low, high)) end)
  in_parts(gone, function(low, high) redis.call('HDEL', ids, unpack(gone, low, high)) end)
  if accepted > 0 then redis.call('HINCRBY', n, 'accepted', accepted) end
  if skipped > 0 then redis.call('HINCRBY', n, 'cancelled', skipped) end
  return table.concat(left_alone)
end
