@problemName aeon_unequal
@timestamps false
@missing False
@univariate false
@dimension 2
@equalLength false
@classLabel true p q
@data
-1.81,-2.32,-3.11:-0.42,1.17,0.92:p
-0.28,-1.19,-0.11,-1.04,-0.92:-0.38,-0.16,0.46,-0.69,-1.39:q
-0.63,1.32:-1.68,-0.76:p
