"""The shared state: everything the gateways agree on, in one Redis. README.md beside this file is the data model.

keys       the only place a key is spelled
scripts    the Lua scripts as typed values; lua/ has their text
wire       one pipelined connection: who waits for which reply, and for how long
store      connected or not, and what follows from it
pool       one pool's state as one gateway uses it: place, settle, reassert
worker     the chores: heartbeats, reaping, trimming
responses  where stored responses live
inspect    ownership, for people
"""
