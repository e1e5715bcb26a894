-- A record is a task's value in a queue's stream: the 14 bytes of the address it came from, then its entry.
-- For each id in a stream `queued` has that address, then "<stream id> <queue>", and once a worker has taken it
-- " <worker>/<nonce>/<since in ms>", its claim. A '!' at the end means that it is to be cancelled.
local WIDTHS = {3600000, 1000, 50, 1, 4294967296}

local function address_of(record) return string.sub(record, 1, 14) end

local function idh_in(record) return string.sub(record, 20, 35) end

local function in_lane(record) return math.floor(string.byte(record, 19) / 2) % 2 == 1 end

-- Return name, incarnation (as the score of the slice) and index of an address.
local function place_of(address)
  local width, high, low, r, index = struct.unpack('>BI2I4I3I4', address)
  local start = high * 4294967296 + low
  return string.format('%.0f.%.0f', WIDTHS[width + 1], start), math.floor(start / 1000) + r / 1048576, index
end

-- Call a command with as many values at once as Lua can unpack; `third` is for commands that need one more word.
local function spread(values, count, command, key, third)
  for first = 1, count, 4000 do
    local last = math.min(first + 3999, count)
    if third then redis.call(command, key, third, unpack(values, first, last))
    else redis.call(command, key, unpack(values, first, last)) end
  end
end
