-- Find slices, by name, that have keys although they are not live.
--
-- KEYS  slices; s, f, d and x of each
-- ARGV  count, their names
-- returns {position, entries, bitmaps ...} of slices that have keys but are not among the live slices
local count = tonumber(ARGV[1])
local out = {}
local scores = redis.call('ZMSCORE', KEYS[1], unpack(ARGV, 2, count + 1))
for i = 1, count do
  if not scores[i] then
    local at = 1 + (i - 1) * 4
    local entries = redis.call('LLEN', KEYS[at + 1])
    local bitmaps = redis.call('EXISTS', KEYS[at + 2], KEYS[at + 3], KEYS[at + 4])
    if entries + bitmaps > 0 then
      out[#out + 1], out[#out + 2], out[#out + 3] = i, entries, bitmaps
    end
  end
end
return out
