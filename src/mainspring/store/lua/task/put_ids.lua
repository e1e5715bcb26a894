-- Put tasks that carry the caller's ids into one partition or several; an id that is already known is left alone.
--
-- KEYS  per partition: n, slices, ids, s of each place
-- ARGV  partitions, then per partition: places, then per place: name, score, address prefix, count, then its entries
-- returns per partition {{incarnation, index of the first new entry per place}, {position, address per entry whose id
--   was known}}; positions count the partition's entries from 1, in the order given
-- keeps: the index and the list change together, so a repeated request is one task.
-- Lua can unpack only some thousand values: the caller sends at most 2,000 entries per partition.
local k, a = 1, 2

-- Put into the partition whose keys and arguments come next.
local function put()
  local n, slices, ids, places = KEYS[k], KEYS[k + 1], KEYS[k + 2], tonumber(ARGV[a])
  local idhs, from = {}, a
  for _ = 1, places do
    local count = tonumber(ARGV[a + 4])
    for i = a + 5, a + 4 + count do idhs[#idhs + 1] = string.sub(ARGV[i], 6, 21) end
    a = a + 4 + count
  end
  local known = redis.call('HMGET', ids, unpack(idhs))
  local first_of, taken, pairs_, p, created, at = {}, {}, {}, 0, 0, 0
  a = from
  for place = 1, places do
    local s, prefix, count = KEYS[k + 2 + place], ARGV[a + 3], tonumber(ARGV[a + 4])
    local rows, fresh = nil, count
    for i = 1, count do
      if known[at + i] then
        taken[#taken + 1], taken[#taken + 2], fresh = at + i, known[at + i], fresh - 1
      end
    end
    if fresh < count then
      rows = {}
      for i = 1, count do
        if not known[at + i] then rows[#rows + 1] = ARGV[a + 4 + i] end
      end
    end
    local incarnation, first = 0, 0
    if fresh > 0 then
      incarnation = open_slice(slices, ARGV[a + 1], ARGV[a + 2])
      if rows then first = redis.call('RPUSH', s, unpack(rows)) - fresh
      else first = redis.call('RPUSH', s, unpack(ARGV, a + 5, a + 4 + count)) - fresh end
      local head, index, pack = prefix .. struct.pack('>I3', incarnation), first, struct.pack
      for i = at + 1, at + count do
        if not known[i] then
          pairs_[p + 1], pairs_[p + 2], p = idhs[i], pack('>c10I4', head, index), p + 2
          index = index + 1
        end
      end
      created = created + fresh
    end
    first_of[place * 2 - 1], first_of[place * 2] = incarnation, first
    a, at = a + 4 + count, at + count
  end
  if created > 0 then
    redis.call('HSET', ids, unpack(pairs_, 1, p))
    redis.call('HINCRBY', n, 'accepted', created)
  end
  k, a = k + 3 + places, a + 1
  return {first_of, taken}
end

local answers = {}
for partition = 1, tonumber(ARGV[1]) do answers[partition] = put() end
return answers
