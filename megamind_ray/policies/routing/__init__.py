"""Who reads each extent, and the way its bytes take to the devices."""
