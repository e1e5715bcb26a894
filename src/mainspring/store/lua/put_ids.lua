-- Put tasks that carry the caller's ids into one partition; an id that is known already is left alone.
--
-- KEYS  n, slices, ids, s of each place
-- ARGV  places, then per place: name, score, address prefix, count, then its entries
-- returns {{incarnation, index of the first new entry per place}, {position, address per entry whose id was known}}
--   positions count all entries from 1, in the order given
-- keeps: the index and the list change together, so a repeated request is one task.
-- Lua cannot spread more than some thousand values: the caller sends at most 2,000 entries.
local n, slices, ids = KEYS[1], KEYS[2], KEYS[3]
local places = tonumber(ARGV[1])
local idhs, a = {}, 1
for _ = 1, places do
  local count = tonumber(ARGV[a + 4])
  for i = a + 5, a + 4 + count do idhs[#idhs + 1] = string.sub(ARGV[i], 6, 21) end
  a = a + 4 + count
end
local known = redis.call('HMGET', ids, unpack(idhs))
local put, taken, pairs_, p, created, at = {}, {}, {}, 0, 0, 0
a = 1
for place = 1, places do
  local prefix, count = ARGV[a + 3], tonumber(ARGV[a + 4])
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
    if rows then first = redis.call('RPUSH', KEYS[3 + place], unpack(rows)) - fresh
    else first = redis.call('RPUSH', KEYS[3 + place], unpack(ARGV, a + 5, a + 4 + count)) - fresh end
    local head, index, pack = prefix .. struct.pack('>I3', incarnation), first, struct.pack
    for i = at + 1, at + count do
      if not known[i] then
        pairs_[p + 1], pairs_[p + 2], p = idhs[i], pack('>c10I4', head, index), p + 2
        index = index + 1
      end
    end
    created = created + fresh
  end
  put[place * 2 - 1], put[place * 2] = incarnation, first
  a, at = a + 4 + count, at + count
end
if created > 0 then
  redis.call('HSET', ids, unpack(pairs_, 1, p))
  redis.call('HINCRBY', n, 'accepted', created)
end
return {put, taken}
