"""The shared state: everything the gateways agree on, in one Redis. README.md beside this file is the data model.

keys       the only place a key is spelled
scripts    the Lua scripts as typed values; lua/ has their text
wire       one pipelined connection: who waits for which reply, and for how long
store      connected or not, and what follows from it
pool       one pool's state as one gateway uses it: place, settle, reassert
worker     the chores: heartbeats, reaping, trimming
responses  where stored responses live
inspect    ownership, for people
chunks     the names of LMCache's chunks in Redis, from a prompt's tokens
survey     what a Redis tells of itself and of what is in it, for the doctor
"""
